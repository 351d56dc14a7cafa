"""Steps across stages: how they are cut, the orders of their calls, and a stage's session. A plain step needs none."""
