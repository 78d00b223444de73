"""The port for administrators: HTTP pages, and the few requests that change something."""
