"""Router, block servers and client services in one thread and in virtual time, broken in every way, seed by seed."""
