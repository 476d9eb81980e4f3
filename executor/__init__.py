"""Running a plan: ranks, model, pipeline, hot switch, optimizer, measuring. Meets the planner in a plan file only."""
