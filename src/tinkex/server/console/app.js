import "x";
