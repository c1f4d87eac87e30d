"""What a memory check is to do: the project's settings, and the plan made of all settings."""
