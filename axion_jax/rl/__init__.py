"""What is optimised and how: pure functions of arrays and trajectories that see no model."""
