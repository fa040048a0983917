"""See what a program became: a plan's report as tables, explanations, pages and traces."""
