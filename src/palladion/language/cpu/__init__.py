"""The native CPU dialect: what a user can say to the compiler for this machine's processor."""
