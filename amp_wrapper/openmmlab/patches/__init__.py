"""The changes to mmengine, each without effect where no wrapper of this package is attached."""
