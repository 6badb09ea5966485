"""Code for CPUs that is written as LLVM's text and compiled where it runs. It imports only the chassis of Corolla."""
