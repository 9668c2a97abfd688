"""The parameter server: every rank computes, and serves its rows of every weight."""
