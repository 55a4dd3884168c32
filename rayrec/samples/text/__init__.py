"""Records of text: read, checked, cleaned and written as a data set; chat templates and tokenizers.

`prepare.prepare_text` is the door of preparation, `dataset.TextDataset` that of reading. Imports the folders
`base`, `dataset`, `importers` and `prepare` of this room.
"""
