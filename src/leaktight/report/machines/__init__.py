"""Decisions for programs: the gate of `--fail-on`, junit.xml and sarif.json."""
