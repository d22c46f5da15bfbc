"""How far the planner's predictions are from published measurements."""
