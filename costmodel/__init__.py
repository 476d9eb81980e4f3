"""Pricing: the seconds and bytes of what a plan describes, and the profiles that prices are made from."""
