"""The run folder: layout, lock, control requests, signals, incidents."""
