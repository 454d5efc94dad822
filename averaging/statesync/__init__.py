"""State for newcomers: they agree with most peers on one snapshot, and download it from all its donors."""
