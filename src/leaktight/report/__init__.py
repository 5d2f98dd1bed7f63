"""Pictures and pages made from result files alone."""
