"""The partitions that an experiment can name, by what they go by: labels, sizes, features, regions, the data's own."""
