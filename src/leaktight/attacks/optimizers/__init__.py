"""What minimises an attack's loss, and how its iterations are traced and run side by side."""
