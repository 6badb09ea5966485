"""Who a process is, whom it believes to be who they say, and what each may ask of the others."""
