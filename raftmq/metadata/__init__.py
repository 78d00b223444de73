"""The metadata group: its commands, the image they make, snapshots, configs, how it is formed."""
