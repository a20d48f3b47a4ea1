"""AdamW with exact masters, its kernels and the learning-rate schedules."""
