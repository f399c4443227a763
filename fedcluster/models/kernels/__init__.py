"""The compiled engine, and traced gradients for models that it does not have."""
