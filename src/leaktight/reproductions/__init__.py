"""Tables and figures of publications as recipes: what to run, the published numbers, and rules that decide claims."""
