"""What a user builds: nodes, edges and the layers on them."""
