"""Tools around training: migrate, board, report, sweep, tune, pairs, demo.

They read and write run folders and call commands. The core finds them through `rather.registry`
and never imports them.
"""
