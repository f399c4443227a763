"""Data: where samples come from, the columns of a table, and the dataset that a model sees."""
