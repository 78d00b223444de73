"""How clients prove who they are, without sockets, clocks and threads: the server's side of SASL's
mechanisms. `exchange.py` says what they share; nothing here knows of Kafka's requests."""
