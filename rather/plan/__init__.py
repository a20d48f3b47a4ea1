"""What a run will take, before it starts: memory by part, time, disk. Every check of memory uses this arithmetic."""
