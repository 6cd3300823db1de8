"""The scheduling problem as a mixed-integer linear program, and the solvers that take it."""
