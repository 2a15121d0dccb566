"""The protocols that ``orders`` declares and the layers above implement."""
