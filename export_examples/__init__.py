"""Programs that use the operators the way an inference engine does."""
