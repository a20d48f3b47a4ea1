"""Commands that belong to no other room: `data`, `plan`, `doctor`, those on run folders and those
on models.
"""
