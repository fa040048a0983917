"""The compiler: from a traced graph with global types to the plan that every worker runs."""
