"""`rather board`: a local page over all runs of a folder.

It reads run folders and writes nothing into them.
"""
