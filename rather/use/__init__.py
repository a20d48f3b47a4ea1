"""What is done with weights that are there already: score, chat, export, merge, compare."""
