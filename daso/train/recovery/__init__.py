"""Elastic training: continues without lost nodes, and replaces them by spare ones."""
