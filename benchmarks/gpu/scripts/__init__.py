"""What is checked, proven and told on a card: scripts of a user's, and a lesson that fails on purpose."""
