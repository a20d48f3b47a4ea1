"""What users get: wheel, container, notebook, and the files that a project has around its code."""
