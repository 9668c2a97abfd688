"""Training that goes on when nodes are lost, and takes in spare ones."""
