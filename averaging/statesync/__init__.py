"""State for newcomers: who has which snapshot, which one most peers agree on, and how it comes from all of them."""
