"""What is reported of a race: findings with verified fixes, known ones, several ranks."""
