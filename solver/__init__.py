"""Choosing a plan: candidates, priced columns, baselines, the exact model and its backends, comparison."""
