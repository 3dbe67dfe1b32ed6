"""Host memory: exact pages, the split master, and the store that holds every parameter's state."""
