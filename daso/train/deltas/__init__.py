"""Parameters exchanged between nodes: encoded, sent, merged."""
