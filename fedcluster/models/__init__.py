"""Models: the zoo, the model as one vector, local SGD and the local optimizers."""
