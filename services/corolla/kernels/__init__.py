"""Code for processors, written as text and compiled where it runs. It knows the chassis, and nothing else of ours."""
