"""Forecasts of memory, time and disk; preflight and out-of-memory advice use them too."""
