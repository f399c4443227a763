"""The paper, reproduced: its figures as experiments, and its claims as tests over them."""
