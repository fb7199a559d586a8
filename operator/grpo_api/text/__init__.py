"""What all types share: base classes, schemas, quantities, names and the words between operator and
pod."""
