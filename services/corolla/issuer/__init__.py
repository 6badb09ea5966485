"""The issuer: signs certificates for machines that show a token, and revokes them."""
