"""Parts that a step uses where its program asks for them: copies of carries to the host and back."""
