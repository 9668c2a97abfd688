"""Everything a person types."""
