"""The documentation site: what mkdocs is handed besides docs/, and the pictures and notebooks that are made by hand."""
