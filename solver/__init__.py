"""From a problem to a plan: known schedules, list scheduling, search, mathematical programming and lower bounds."""
